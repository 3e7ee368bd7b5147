#!/bin/sh
# Gather the one layer that the builder has above its base: Bazelisk. Runs inside the bake.
# /tools holds the binary and its digest in the format of sha256sum.
set -eu

mkdir -p /out/usr/local/bin /out/home/tpu /out/workspace
(cd /tools && sha256sum --check --strict --quiet SHA256SUMS)
cp /tools/bazelisk /out/usr/local/bin/bazelisk
# the name by which the scripts of a source call it
ln -s bazelisk /out/usr/local/bin/bazel

find /out -type d -exec chmod 755 {} +
chmod 755 /out/usr/local/bin/bazelisk
# a build runs as the user who asked for it, whatever its number, so both are open like /tmp
chmod 1777 /out/home/tpu /out/workspace
find /out -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
