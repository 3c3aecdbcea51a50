# pdserve in an image, for one host and for the pods of a Ray cluster (docs/deployment.md).
#
#   docker build -t pdserve .                                            CPUs
#   docker build -t pdserve:gpu --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 \
#       --build-arg EXTRAS=hub,kuberay,otel,gpu --build-arg TORCH=torch==2.11.0 \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#
#   docker run --rm --shm-size=1g -p 127.0.0.1:8000-8001:8000-8001 -v pdserve:/var/cache/pdserve pdserve
ARG BASE=debian:bookworm-slim
FROM ${BASE}

ARG EXTRAS=hub,kuberay,otel
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# A compiler: kernels for CPUs are compiled where they run, Triton compiles its launchers. wget: the
# probes that KubeRay gives its pods call it. tini: Ray leaves orphans, which process 1 has to reap.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
       ca-certificates gcc libc6-dev python3 python3-dev python3-venv tini wget \
    && apt-get clean && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/pdserve/bin:$PATH \
    PDSERVE_CACHE=/var/cache/pdserve \
    PYTHONUNBUFFERED=1

# All that is not ours comes first: a change of our code does not install it again. What the lock
# pins is of that release, but for setuptools, which each torch wants another one of, and torch itself,
# which stays the one that was asked for; what the extras bring beside it is as new as it comes.
WORKDIR /opt/pdserve/source
COPY requirements.lock pyproject.toml ./
# hadolint ignore=DL3013
RUN python3 -m venv /opt/pdserve \
    && grep -v -e '^torch==' -e '^setuptools==' requirements.lock > constraints.txt \
    && pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" "${TORCH}" \
    && pip list --format=freeze | grep '^torch==' >> constraints.txt \
    && python3 -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
       extras = [project["optional-dependencies"][extra] for extra in sys.argv[1].split(",") if extra]; \
       print("\n".join(sum(extras, project["dependencies"])))' "${EXTRAS}" > needed.txt \
    && pip install --no-cache-dir -c constraints.txt -r needed.txt hatchling

COPY LICENSE ./
COPY pdserve pdserve
COPY router router
COPY prefill_node prefill_node
COPY decode_node decode_node
COPY kv_transfer kv_transfer
# The links: KubeRay runs `ray` by login shells, which have a PATH of their own.
RUN pip install --no-cache-dir --no-build-isolation -c constraints.txt ".[${EXTRAS}]" \
    && ln -s /opt/pdserve/bin/pdserve /opt/pdserve/bin/ray /usr/local/bin/ \
    && useradd --create-home --uid 1000 --non-unique pdserve \
    && install -d -o 1000 -g 0 -m 0775 /var/cache/pdserve /work

USER 1000
WORKDIR /work
VOLUME /var/cache/pdserve
EXPOSE 8000 8001

# Of the cluster that runs in this container; the pods of a Ray cluster have probes of their own.
HEALTHCHECK --interval=15s --timeout=5s --start-period=300s CMD ["pdserve", "status"]

# /work/cluster.yaml is served where one is mounted, else the defaults. `docker stop` kills after 10 s.
ENTRYPOINT ["/usr/bin/tini", "--", "pdserve"]
CMD ["serve", "--set", "router.host=0.0.0.0", "--grace-s", "5"]
