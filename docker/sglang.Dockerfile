# roll_lite with SGLang for NVIDIA GPUs, from the project's folder: docker build -f docker/sglang.Dockerfile -t roll-lite:sglang .
# Not built and not run yet.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# Triton and the engine compile kernels while they run: a C compiler, Python.h, and nvcc of the base image. KubeRay's probes call wget, the
# notice of `roll-lite launch k8s` pkill, and chaos that cuts off nodes ip.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential iproute2 libnuma1 procps python3.12-dev python3.12-venv wget \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/roll_lite
COPY requirements/cuda-sglang.lock requirements/
RUN python3.12 -m venv /opt/venv && pip install --no-cache-dir --no-deps -r requirements/cuda-sglang.lock

# roll_lite/examples and roll_lite/docs are links to examples/ and docs/.
COPY pyproject.toml README.md LICENSE ./
COPY docs docs
COPY examples examples
COPY roll_lite roll_lite
RUN pip install --no-cache-dir --no-deps --no-build-isolation . && roll-lite --version

WORKDIR /work
