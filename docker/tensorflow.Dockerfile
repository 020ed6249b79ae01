# TensorFlow with CUDA 12, from PyPI's packages: the machine needs NVIDIA's driver and its container toolkit alone.
#
#     docker build -f docker/tensorflow.Dockerfile -t kerasdp:tensorflow .
#     docker run --rm --gpus=all --shm-size=8g --user="$(id -u):$(id -g)" -v "$PWD:/work" \
#         kerasdp:tensorflow train --backend=tensorflow
#
# python:3.12.13-slim-bookworm is rebuilt now and then. For the same base each time, add the digest that
# `docker buildx imagetools inspect` prints for it: --build-arg=BASE=python:3.12.13-slim-bookworm@sha256:...
ARG BASE=python:3.12.13-slim-bookworm
FROM $BASE
COPY docker/tensorflow.lock /src/docker/
# What the lock says, file for file; then kerasdp itself, which takes nothing from an index.
RUN pip install --no-cache-dir --require-hashes --only-binary=:all: -r /src/docker/tensorflow.lock
COPY . /src
RUN pip install --no-cache-dir --no-index --no-deps --no-build-isolation /src \
 && install -d -o 1000 -g 1000 /work
# Not root. Another user, who may write to /work of the machine: docker run --user="$(id -u):$(id -g)".
ENV HOME=/tmp USER=kerasdp
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["kerasdp"]
CMD ["--help"]
