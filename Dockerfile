# Trains jobs on Kubernetes and SkyPilot: `make image` builds it under the name that manifests give it.
# GPUs need no other base: PyTorch's wheels bring CUDA's libraries, the node its driver.
FROM python:3.11.14-slim-bookworm

# Triton compiles its launchers when a run starts. Versions of Debian 12.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc=4:12.2.* libc6-dev=2.36-* \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/shardwise
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt ".[train,data,remote]"

# Not root. SkyPilot sets its own tools up inside of the container and needs it: --build-arg RUN_AS=0 builds that one.
ARG RUN_AS=1000
RUN useradd --create-home --uid 1000 shardwise \
    && mkdir -p /runs /data \
    && chown shardwise:shardwise /runs
ENV PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
WORKDIR /runs
USER ${RUN_AS}
CMD ["shardwise", "--help"]
