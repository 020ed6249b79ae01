# All three backends on virtual CPU devices, to try and to test kerasdp.
#
#     docker build -f docker/cpu.Dockerfile -t kerasdp:cpu .
#     docker run --rm kerasdp:cpu train --backend=jax --gpus=4
#
# The torch package on PyPI for Linux includes gigabytes of CUDA libraries. For an image without CUDA, run
# `sh docker/lock.sh cpu --torch-backend=cpu`, which writes a lock file with PyTorch's builds for the CPU. Then pass
# the URL of these builds (pytorch.org, "Get Started") as --build-arg=PIP_EXTRA_INDEX_URL=.
#
# The image python:3.12.13-slim-bookworm is rebuilt from time to time. To use the same base image in each build, add
# the digest that `docker buildx imagetools inspect` prints for this image:
# --build-arg=BASE=python:3.12.13-slim-bookworm@sha256:...
ARG BASE=python:3.12.13-slim-bookworm
FROM $BASE
ARG PIP_EXTRA_INDEX_URL
COPY docker/cpu.lock /src/docker/
# Installs the files of the lock file, by hash. Then installs kerasdp, without downloads from a package index.
RUN pip install --no-cache-dir --require-hashes --only-binary=:all: -r /src/docker/cpu.lock
COPY . /src
RUN pip install --no-cache-dir --no-index --no-deps --no-build-isolation /src \
 && install -d -o 1000 -g 1000 /work
# The container does not run as root. To write to /work as your user: docker run --user="$(id -u):$(id -g)".
ENV HOME=/tmp USER=kerasdp
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["kerasdp"]
CMD ["--help"]
