#!/bin/sh
# Startup script of a TPU VM: installs tpu-run and its service from the metadata that the VM was
# created with, and starts it. It runs as root at each boot; what is in the metadata wins.
#
#     gcloud compute tpus tpu-vm create NAME --zone ZONE --accelerator-type TYPE --version VERSION \
#         --metadata-from-file startup-script=startup.sh,tpu-run=tpu-run,tpu-run-service=tpu-run.service \
#         --metadata tpu-run-image=REGISTRY/NAME@sha256:DIGEST,tpu-run-command='python train.py'
#
# More metadata: tpu-run-options (of tpu-run), tpu-run-key (a cosign public key, by
# --metadata-from-file: then an image without its signature does not run).
# For trials: TPU_RUN_METADATA names another server, TPU_RUN_ROOT another root folder.
set -eu

server=${TPU_RUN_METADATA:-http://metadata.google.internal/computeMetadata/v1/instance/attributes}
root=${TPU_RUN_ROOT:-}
settings=$root/etc/tpu-run
umask 077

fail() {
    echo "tpu-run startup: $1" >&2
    exit "$2"
}

# Writes an attribute of the VM to a file; fails if the VM has none of this name. A server that says
# neither ends all: without its answer nobody knows whether a key is asked for.
attribute() {
    status=$(curl --silent --max-time 10 --retry 5 --retry-connrefused --write-out "%{http_code}" \
        --header "Metadata-Flavor: Google" --output "$2.part" "$server/$1") || status=none
    case $status in
    200) return 0 ;;
    404) rm -f "$2.part" ;;
    *) fail "the metadata server does not answer for $1 (status $status)" 2 ;;
    esac
    return 1
}

required() {
    attribute "$1" "$2" || fail "the VM has no metadata $1" 2
}

# Puts a file in its place whole or not at all.
place() {
    chmod "$1" "$2.part"
    mv -f "$2.part" "$2"
}

# One line of an environment file of systemd, whose double quotes need these escapes.
setting() {
    if attribute "$1" "$settings/value"; then
        value=$(sed 's/[\\"]/\\&/g' "$settings/value.part")
        rm -f "$settings/value.part"
        case $value in
        *"
"*) fail "metadata $1 has more than one line" 2 ;;
        esac
        printf '%s="%s"\n' "$2" "$value"
    fi
}

mkdir -p "$settings" "$root/usr/local/bin" "$root/etc/systemd/system"
command -v curl >/dev/null || fail "curl is missing" 2
if ! command -v docker >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq docker.io; } || fail "no docker to install" 2
fi

required tpu-run "$root/usr/local/bin/tpu-run"
head -n 1 "$root/usr/local/bin/tpu-run.part" | grep -q '^#!.*python3' ||
    fail "metadata tpu-run is not the program" 2
required tpu-run-service "$root/etc/systemd/system/tpu-run.service"
required tpu-run-image "$settings/image"
[ -s "$settings/image.part" ] || fail "metadata tpu-run-image is empty" 2
rm -f "$settings/image.part"

key=
if attribute tpu-run-key "$settings/cosign.pub"; then
    place 644 "$settings/cosign.pub"
    key="--key /etc/tpu-run/cosign.pub "
else
    rm -f "$settings/cosign.pub"
fi
{
    setting tpu-run-image TPU_RUN_IMAGE
    setting tpu-run-command TPU_RUN_COMMAND
    options=$(setting tpu-run-options TPU_RUN_OPTIONS)
    options=${options#TPU_RUN_OPTIONS=\"}
    printf 'TPU_RUN_OPTIONS="%s%s"\n' "$key" "${options%\"}"
} >"$settings/tpu-run.conf.part"

place 755 "$root/usr/local/bin/tpu-run"
place 644 "$root/etc/systemd/system/tpu-run.service"
place 600 "$settings/tpu-run.conf"

systemctl daemon-reload
systemctl enable tpu-run.service
systemctl restart tpu-run.service
