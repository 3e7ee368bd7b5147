# The tree of images, declared once. "./forge bake" fills in the variables; to look at it by hand:
#
#     cd images && docker buildx bake --print

variable "PYTHON" {
  # Python X.Y, the one of the base's Debian suite
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

target "_image" {
  context    = "."
  dockerfile = "Dockerfile"
  platforms  = ["linux/amd64"]
  # attestations hold the time and place of the bake, so no two bakes would agree
  attest = ["type=provenance,disabled=true", "type=sbom,disabled=true"]
  contexts = {
    base = BASE
    # one context per group of wheels: a sub-folder of a shared one would be sent again each time
    wheels-libtpu    = "${WORK}/wheels/libtpu"
    wheels-torch     = "${WORK}/wheels/torch"
    wheels-torch-tpu = "${WORK}/wheels/torch-tpu"
    wheels-rest      = "${WORK}/wheels/rest"
    wheels-pip       = "${WORK}/wheels/pip"
    wheels-smoke     = "${WORK}/wheels/smoke"
    facts            = "${WORK}/facts"
    suite            = "${WORK}/suite"
  }
  args = {
    PYTHON            = PYTHON
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
  }
  labels = {
    "io.tpuforge.python"  = PYTHON
    "io.tpuforge.flavour" = FLAVOUR
  }
}

target "runtime" {
  inherits = ["_image"]
  target   = "runtime"
  labels = {
    "io.tpuforge.image"                    = "runtime"
    "org.opencontainers.image.title"       = "TorchTPU runtime"
    "org.opencontainers.image.description" = "PyTorch for Google TPUs: CPU torch, torch_tpu and libtpu, with a health suite"
  }
}

# Where the wheel is built from source; the same for every Python.
target "builder" {
  context    = "."
  dockerfile = "Dockerfile.builder"
  target     = "builder"
  platforms  = ["linux/amd64"]
  attest     = ["type=provenance,disabled=true", "type=sbom,disabled=true"]
  contexts = {
    base  = BASE
    tools = "${WORK}/tools"
  }
  args = {
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
  }
  labels = {
    "io.tpuforge.image"                    = "builder"
    "org.opencontainers.image.title"       = "TorchTPU builder"
    "org.opencontainers.image.description" = "Where the torch_tpu wheel is built from source: Bazelisk, git and Python, no compiler of its own"
  }
}
