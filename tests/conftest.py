"""What every process of the tests begins with."""

from __future__ import annotations

import signal

# A script's background job starts with Ctrl-C ignored, and so would every program that a test
# starts: those that have to end by it could never pass.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
