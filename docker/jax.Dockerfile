# JAX with CUDA 13, from PyPI's packages: the host needs only NVIDIA's driver and container toolkit.
#
#     docker build -f docker/jax.Dockerfile -t kerasdp:jax .
#     docker run --rm --gpus=all --shm-size=8g --user="$(id -u):$(id -g)" -v "$PWD:/work" \
#         kerasdp:jax train --backend=jax
#
# The image python:3.12.13-slim-bookworm is rebuilt from time to time. To use the same base image in each build, add
# the digest that `docker buildx imagetools inspect` prints for this image:
# --build-arg=BASE=python:3.12.13-slim-bookworm@sha256:...
ARG BASE=python:3.12.13-slim-bookworm
FROM $BASE
COPY docker/jax.lock /src/docker/
# Installs the files of the lock file, by hash. Then installs kerasdp, without downloads from a package index.
RUN pip install --no-cache-dir --require-hashes --only-binary=:all: -r /src/docker/jax.lock
COPY . /src
RUN pip install --no-cache-dir --no-index --no-deps --no-build-isolation /src \
 && install -d -o 1000 -g 1000 /work
# The container does not run as root. To write to /work as your user: docker run --user="$(id -u):$(id -g)".
ENV HOME=/tmp USER=kerasdp
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["kerasdp"]
CMD ["--help"]
