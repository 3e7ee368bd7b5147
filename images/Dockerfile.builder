# The builder: where the TorchTPU wheel is built from source (docs/bake.md, docs/build_wheel.md).
#
# The base brings git, Python and archivers; this adds Bazelisk. Bazel itself is what Bazelisk gets
# for a source's .bazelversion, so it is no part of the image. There is no compiler: TorchTPU's
# build brings its own. Nothing here has a network.

# hadolint global ignore=DL3006

FROM base AS gathered
ARG SOURCE_DATE_EPOCH
RUN --network=none \
    --mount=type=bind,source=files/build,target=/build \
    --mount=type=bind,from=tools,target=/tools \
    ["/bin/sh", "/build/gather_builder.sh"]

FROM base AS image
COPY --link --from=gathered /out/ /
# the folder is there, with its time, so this adds nothing
WORKDIR /workspace
ENV LANG=C.UTF-8 \
    HOME=/home/tpu \
    USER=tpu
USER 1000:1000
CMD ["bash"]
