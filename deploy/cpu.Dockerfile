# docker build -f deploy/cpu.Dockerfile -t ray_apr:cpu . && docker run --rm --shm-size=4g ray_apr:cpu
FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 wget \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ray_apr
COPY requirements/cpu.txt requirements/cpu.txt
RUN pip install --no-cache-dir --no-deps torch==2.13.0+cpu \
      --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir --no-deps -r requirements/cpu.txt
COPY pyproject.toml README.md LICENSE ./
COPY ray_apr ray_apr
COPY examples examples
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e .
CMD ["python", "-m", "ray_apr", "train", "examples/arithmetic/quickstart.yaml"]
