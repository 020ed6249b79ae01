#!/bin/sh
# Writes the lock files of the images. A lock file lists each package of an image, with the hashes of its files on PyPI,
# for Linux on x86_64 and the Python version of the images. Packages keep their versions if possible. With --upgrade,
# packages get their newest versions.
#
#     pip install uv && sh docker/lock.sh             after a change of pyproject.toml or constraints.txt
#     sh docker/lock.sh cpu --torch-backend=cpu       one image, with options of uv
set -eu
cd "$(dirname "$0")/.."
images=${1:-cpu jax tensorflow torch}
[ $# = 0 ] || shift

for image in $images; do
    case $image in
        cpu) extras="torch jax"; more=tensorflow-cpu ;;
        torch) extras=torch; more= ;;
        *) extras=$image-cuda; more= ;;
    esac
    # The lock files include hatchling, so pip builds kerasdp without downloads from a package index.
    printf '%s\n' hatchling $more | uv --no-config pip compile pyproject.toml - --constraints=constraints.txt \
        $(printf -- '--extra=%s ' $extras fsspec) --python-version=3.12 --python-platform=x86_64-manylinux_2_28 \
        --only-binary=:all: --generate-hashes --no-annotate --quiet --custom-compile-command="sh docker/lock.sh" \
        --output-file="docker/$image.lock" "$@" > /dev/null
done
