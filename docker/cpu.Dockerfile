# All three backends on virtual CPU devices: to try kerasdp, and to test.
#
#     docker build -f docker/cpu.Dockerfile -t kerasdp:cpu .
#     docker run --rm kerasdp:cpu train --backend=jax --gpus=4
#
# PyPI's torch for Linux brings CUDA, which is gigabytes: with --build-arg=PIP_EXTRA_INDEX_URL=, the address of PyTorch's
# builds for the CPU (pytorch.org, "Get Started"), and --build-arg=TORCH=torch==2.13.0+cpu it does not.
FROM python:3.12-slim-bookworm
ARG PIP_EXTRA_INDEX_URL
ARG TORCH=torch==2.13.0
COPY . /src
RUN pip install --no-cache-dir "$TORCH" \
 && pip install --no-cache-dir -c /src/constraints.txt "/src[jax,fsspec]" tensorflow-cpu
WORKDIR /work
ENTRYPOINT ["kerasdp"]
CMD ["--help"]
