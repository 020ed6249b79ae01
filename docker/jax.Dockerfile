# JAX with CUDA 13, from PyPI's packages: the machine needs NVIDIA's driver and its container toolkit alone.
#
#     docker build -f docker/jax.Dockerfile -t kerasdp:jax .
#     docker run --rm --gpus=all --shm-size=8g -v "$PWD:/work" kerasdp:jax train --backend=jax
FROM python:3.12-slim-bookworm
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[jax-cuda,fsspec]"
WORKDIR /work
ENTRYPOINT ["kerasdp"]
CMD ["--help"]
