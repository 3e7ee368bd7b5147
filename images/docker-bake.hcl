# The tree of images, declared once. "./forge bake" fills in the variables; to look at it by hand:
#
#     cd images && docker buildx bake --print all
#
# "./forge images" shows it as a table. One file serves every Python: an image with a flavour can be
# baked for those that the flavour is locked for (lock/pins.toml).

variable "PYTHON" {
  # Python X.Y, the one of the base
  default = "3.11"
}

variable "FLAVOUR" {
  # the lock that the image is made from: lock/<flavour>-py<XY>.txt
  default = "runtime"
}

variable "SOURCE_DATE_EPOCH" {
  # time of everything in the image, seconds since 1970 (lock/pins.toml: epoch)
  default = "0"
}

variable "BASE" {
  # the root filesystem, named by digest: oci-layout://FOLDER@sha256:… or docker-image://…@sha256:…
  default = "oci-layout://../out/base/bookworm"
}

variable "WORK" {
  # what the bake prepared: one folder per context
  default = "../out/bake/runtime-py311"
}

group "default" {
  targets = ["runtime"]
}

group "all" {
  targets = ["base", "runtime", "pallas", "train", "serve", "dev", "builder", "simulator"]
}

# What all have in common.
target "_any" {
  context   = "."
  target    = "image"
  platforms = ["linux/amd64"]
  # attestations hold the time and place of the bake, so no two bakes would agree
  attest = ["type=provenance,disabled=true", "type=sbom,disabled=true"]
  contexts = {
    base = BASE
  }
  args = {
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
  }
}

# An image with wheels: one layer per group of them.
target "_wheels" {
  inherits   = ["_any"]
  dockerfile = "Dockerfile"
  contexts = {
    # one context per group of wheels: a sub-folder of a shared one would be sent again each time
    wheels-libtpu    = "${WORK}/wheels/libtpu"
    wheels-torch     = "${WORK}/wheels/torch"
    wheels-torch-tpu = "${WORK}/wheels/torch-tpu"
    wheels-rest      = "${WORK}/wheels/rest"
    wheels-pip       = "${WORK}/wheels/pip"
    wheels-smoke     = "${WORK}/wheels/smoke"
    wheels-installer = "${WORK}/wheels/installer"
    facts            = "${WORK}/facts"
    suite            = "${WORK}/suite"
  }
  args = {
    PYTHON = PYTHON
    STACK  = "runtime"
  }
  labels = {
    "io.tpuforge.python"                = PYTHON
    "io.tpuforge.flavour"               = FLAVOUR
    "org.opencontainers.image.licenses" = "Apache-2.0 AND BSD-3-Clause AND LicenseRef-libtpu AND LicenseRef-in-the-image"
  }
}

# One with the packages of a further flavour, in a layer of their own above those of the runtime.
target "_child" {
  inherits = ["_wheels"]
  contexts = {
    wheels-more = "${WORK}/wheels/more"
  }
  args = {
    STACK = "child"
  }
}

# Debian with its Python and the user: what the others stand on.
target "base" {
  inherits   = ["_any"]
  dockerfile = "Dockerfile.base"
  labels = {
    "io.tpuforge.image"                    = "base"
    "io.tpuforge.python"                   = PYTHON
    "io.tpuforge.budget.compressed"        = "50MB"
    "io.tpuforge.budget.unpacked"          = "150MB"
    "org.opencontainers.image.title"       = "TorchTPU base"
    "org.opencontainers.image.description" = "Debian with Python, from locked packages: what the images of TorchTPU stand on"
    "org.opencontainers.image.licenses"    = "LicenseRef-in-the-image"
  }
}

target "runtime" {
  inherits = ["_wheels"]
  labels = {
    "io.tpuforge.image"                    = "runtime"
    "io.tpuforge.budget.compressed"        = "520MB"
    "io.tpuforge.budget.unpacked"          = "2050MB"
    "org.opencontainers.image.title"       = "TorchTPU runtime"
    "org.opencontainers.image.description" = "PyTorch for Google TPUs: CPU torch, torch_tpu and libtpu, with a health suite"
  }
}

target "pallas" {
  inherits = ["_child"]
  labels = {
    "io.tpuforge.image"                    = "pallas"
    "io.tpuforge.flavour"                  = "pallas"
    "io.tpuforge.budget.compressed"        = "640MB"
    "io.tpuforge.budget.unpacked"          = "2600MB"
    "org.opencontainers.image.title"       = "TorchTPU Pallas"
    "org.opencontainers.image.description" = "TorchTPU runtime with JAX, to write Pallas kernels for TPUs"
  }
}

target "train" {
  inherits = ["_child"]
  labels = {
    "io.tpuforge.image"                    = "train"
    "io.tpuforge.flavour"                  = "train"
    "io.tpuforge.budget.compressed"        = "660MB"
    "io.tpuforge.budget.unpacked"          = "2700MB"
    "org.opencontainers.image.title"       = "TorchTPU training"
    "org.opencontainers.image.description" = "TorchTPU runtime with transformers, datasets, accelerate and torchtitan"
  }
}

target "serve" {
  inherits = ["_child"]
  labels = {
    "io.tpuforge.image"                    = "serve"
    "io.tpuforge.flavour"                  = "serve"
    "io.tpuforge.budget.compressed"        = "1500MB"
    "io.tpuforge.budget.unpacked"          = "5500MB"
    "org.opencontainers.image.title"       = "TorchTPU serving"
    "org.opencontainers.image.description" = "TorchTPU runtime with vLLM for TorchTPU"
  }
}

target "dev" {
  inherits = ["_child"]
  labels = {
    "io.tpuforge.image"                    = "dev"
    "io.tpuforge.flavour"                  = "dev"
    "io.tpuforge.budget.compressed"        = "530MB"
    "io.tpuforge.budget.unpacked"          = "2100MB"
    "org.opencontainers.image.title"       = "TorchTPU development"
    "org.opencontainers.image.description" = "TorchTPU runtime with IPython, pytest, py-spy, build and ninja"
  }
}

# Where the wheel is built from source; the same for every Python.
target "builder" {
  inherits   = ["_any"]
  dockerfile = "Dockerfile.builder"
  contexts = {
    tools = "${WORK}/tools"
  }
  labels = {
    "io.tpuforge.image"                    = "builder"
    "io.tpuforge.budget.compressed"        = "70MB"
    "io.tpuforge.budget.unpacked"          = "220MB"
    "org.opencontainers.image.title"       = "TorchTPU builder"
    "org.opencontainers.image.description" = "Where the torch_tpu wheel is built from source: Bazelisk, git and Python, no compiler of its own"
    "org.opencontainers.image.licenses"    = "Apache-2.0 AND LicenseRef-in-the-image"
  }
}

# What lets torch_tpu run without a TPU, to be mounted beside any of the others.
target "simulator" {
  inherits   = ["_any"]
  dockerfile = "Dockerfile.simulator"
  contexts = {
    simulator = "${WORK}/simulator"
  }
  labels = {
    "io.tpuforge.image"                    = "simulator"
    "io.tpuforge.budget.compressed"        = "70MB"
    "io.tpuforge.budget.unpacked"          = "300MB"
    "org.opencontainers.image.title"       = "TorchTPU simulator"
    "org.opencontainers.image.description" = "A CPU plugin for PJRT and simulated TPU chips, to be mounted beside an image of TorchTPU"
    "org.opencontainers.image.licenses"    = "Apache-2.0"
  }
}
