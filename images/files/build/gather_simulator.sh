#!/bin/sh
# Gather the one layer of the simulator. Runs inside the bake.
set -eu

# a link of the simulated chip leads nowhere, as it does in a container on a real one
cp -R --no-dereference /simulator /out

find /out -type d -exec chmod 755 {} +
find /out -type f -exec chmod u=rwX,go=rX {} +
find /out -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
