#!/bin/sh
# Make the image `pdserve` where neither a Docker daemon nor a registry of images can be reached: the
# base comes from Debian's mirror, the rest by the Dockerfile. For root on Debian, with
#   apt-get install buildah debootstrap
#
#   scripts/build_image.sh                               then `podman run ... pdserve`, docs/deployment.md
#   scripts/build_image.sh --build-arg EXTRAS=hub        options of `buildah bud` are passed on
#   TAG=pdserve:gpu MIRROR=http://mirror/debian scripts/build_image.sh ...
set -eu

SUITE=bookworm
BASE=localhost/debian:$SUITE-slim

cd "$(dirname "$0")/.."

if ! buildah inspect --type image "$BASE" > /dev/null 2>&1; then
    container=$(buildah from scratch)
    trap 'buildah rm "$container" > /dev/null' EXIT
    root=$(buildah mount "$container")
    # shellcheck disable=SC2086
    debootstrap --variant=minbase "$SUITE" "$root" ${MIRROR:-}
    sed -i "p; s|debian $SUITE |debian-security $SUITE-security |" "$root/etc/apt/sources.list"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    buildah commit --quiet "$container" "$BASE"
fi

# Docker's format: the other one has no health checks.
buildah bud --layers --format docker --build-arg BASE="$BASE" -t "${TAG:-pdserve}" "$@" .
