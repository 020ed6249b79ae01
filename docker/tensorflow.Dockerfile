# TensorFlow with CUDA 12, from PyPI's packages: the machine needs NVIDIA's driver and its container toolkit alone.
#
#     docker build -f docker/tensorflow.Dockerfile -t kerasdp:tensorflow .
#     docker run --rm --gpus=all --shm-size=8g -v "$PWD:/work" kerasdp:tensorflow train --backend=tensorflow
FROM python:3.12-slim-bookworm
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[tensorflow-cuda,fsspec]"
WORKDIR /work
ENTRYPOINT ["kerasdp"]
CMD ["--help"]
