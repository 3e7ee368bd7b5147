#!/bin/sh
# Prove that the groups together are a complete environment, and list it. Runs inside the bake.
set -eu

path=
for site in /groups/*/opt/venv/lib/python3.*/site-packages; do
    path="$path${path:+:}$site"
done
export PYTHONPATH="$path" PYTHONDONTWRITEBYTECODE=1

/opt/venv/bin/python -m pip --isolated check

mkdir -p /out/opt/tpuforge
/opt/venv/bin/python -m pip --isolated list --format=freeze > /out/opt/tpuforge/packages.txt
chmod 644 /out/opt/tpuforge/packages.txt
find /out -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
