# All three backends on virtual CPU devices: to try kerasdp, and to test.
#
#     docker build -f docker/cpu.Dockerfile -t kerasdp:cpu .
#     docker run --rm kerasdp:cpu train --backend=jax --gpus=4
#
# PyPI's torch for Linux brings CUDA, which is gigabytes. Without it: `sh docker/lock.sh cpu --torch-backend=cpu`
# writes a lock with PyTorch's builds for the CPU, and --build-arg=PIP_EXTRA_INDEX_URL= says where pip finds them
# (pytorch.org, "Get Started").
#
# python:3.12.13-slim-bookworm is rebuilt now and then. For the same base each time, add the digest that
# `docker buildx imagetools inspect` prints for it: --build-arg=BASE=python:3.12.13-slim-bookworm@sha256:...
ARG BASE=python:3.12.13-slim-bookworm
FROM $BASE
ARG PIP_EXTRA_INDEX_URL
COPY docker/cpu.lock /src/docker/
# What the lock says, file for file; then kerasdp itself, which takes nothing from an index.
RUN pip install --no-cache-dir --require-hashes --only-binary=:all: -r /src/docker/cpu.lock
COPY . /src
RUN pip install --no-cache-dir --no-index --no-deps --no-build-isolation /src \
 && install -d -o 1000 -g 1000 /work
# Not root. Another user, who may write to /work of the machine: docker run --user="$(id -u):$(id -g)".
ENV HOME=/tmp USER=kerasdp
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["kerasdp"]
CMD ["--help"]
