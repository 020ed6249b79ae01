# PyTorch, which brings CUDA 13, from PyPI's packages: the machine needs NVIDIA's driver and its container toolkit alone.
#
#     docker build -f docker/torch.Dockerfile -t kerasdp:torch .
#     docker run --rm --gpus=all --shm-size=8g -v "$PWD:/work" kerasdp:torch train --backend=torch
FROM python:3.12-slim-bookworm
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[torch,fsspec]"
WORKDIR /work
ENTRYPOINT ["kerasdp"]
CMD ["--help"]
