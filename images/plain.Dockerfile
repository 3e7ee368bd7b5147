# The plain way to such an image, to measure beside (docs/measure.md): the same versions on the same
# base, installed by pip over the network in one step, as most people write it. It is no image of
# the set.

# hadolint global ignore=DL3006

FROM base
# where packages come from, and by which certificates, is the user's own setting: mounted, so that
# nothing of it stays in the image; /local holds the wheels that no index has
RUN --mount=type=bind,from=tools,target=/tools \
    --mount=type=bind,from=local,target=/local \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/certificates.pem \
    python3 -m venv --without-pip /opt/venv \
    && SSL_CERT_FILE=/certificates.pem PIP_CERT=/certificates.pem \
    /opt/venv/bin/python /tools/pip.whl/pip install --no-cache-dir --find-links /local \
    --requirement /tools/requirements.txt pip
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["python"]
