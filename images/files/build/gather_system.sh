#!/bin/sh
# Gather the layer of everything that is neither wheel nor suite. Runs inside the bake.
# /files/root is laid over the root. What differs between an image and its siblings is not here: it
# would keep them from sharing this layer, and all above it.
set -eu

mkdir -p /out/opt /out/etc /out/home/tpu /out/workspace /out/cache
"python$PYTHON" -m venv --without-pip /opt/venv
cp -a /opt/venv /out/opt/venv

cp /etc/passwd /etc/group /out/etc/
if ! grep -q '^tpu:' /out/etc/passwd; then
    echo 'tpu:x:1000:1000:TorchTPU:/home/tpu:/bin/bash' >> /out/etc/passwd
    echo 'tpu:x:1000:' >> /out/etc/group
fi

cp -R /files/root/. /out/

# the checkout's umask and times must not count; only the executable bit does
find /out -type d -exec chmod 755 {} +
find /out -type f -exec chmod u=rwX,go=rX {} +
# any user may be asked for (docker run --user), so these are open like /tmp; a new volume at /cache
# takes over its mode
chmod 1777 /out/home/tpu /out/workspace /out/cache
find /out -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
