#!/bin/sh
# Gather the layer of the health suite, the one that changes most often. Runs inside the bake.
set -eu

mkdir -p /out/opt/tpuforge
cp -R /suite /out/opt/tpuforge/smoke

# the checkout's umask and times must not count; only the executable bit does
find /out -type d -exec chmod 755 {} +
find /out -type f -exec chmod u=rwX,go=rX {} +
find /out -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
