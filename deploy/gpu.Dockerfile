# docker build -f deploy/gpu.Dockerfile -t YOUR_REGISTRY/ray_apr:gpu .
FROM vllm/vllm-openai:v0.32.0
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ray_apr
COPY pyproject.toml README.md LICENSE ./
COPY ray_apr ray_apr
COPY examples examples
RUN python3 -m pip install --no-cache-dir "ray[data,serve,train]==2.60.0" -e ".[gpu]"
ENTRYPOINT []
CMD ["python3", "-m", "ray_apr", "doctor"]
