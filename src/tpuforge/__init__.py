"""Reproducible environments and container images for PyTorch on Google TPUs.

The stages (``lock``, ``build``, ``images``, ``smoke``, ``release``) stand on a small ground
floor (:mod:`~tpuforge.errors`, :mod:`~tpuforge.paths`, :mod:`~tpuforge.process`,
:mod:`~tpuforge.console`, :mod:`~tpuforge.pins`, :mod:`~tpuforge.lockfile`,
:mod:`~tpuforge.pip_settings`, :mod:`~tpuforge.verb`). A stage reads the
files of the stage before it and never imports it.
"""

__version__ = "0.1.0"
