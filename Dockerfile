# TrainingFactory on a CPU.
#   docker build -t training-factory .
#   docker run --rm -v "$PWD/runs:/work/runs" training-factory demo
#   docker run --rm -p 127.0.0.1:7860:7860 -v "$PWD/runs:/work/runs" training-factory ui --host 0.0.0.0
FROM python:3.11-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim
# PyPI's torch for x86-64 brings CUDA libraries that a CPU does not need; this index has builds without them.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /dist /dist
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple \
        -c /tmp/constraints.txt torch \
    && pip install --no-cache-dir -c /tmp/constraints.txt "$(ls /dist/*.whl)[rl]" \
    && rm -r /dist /tmp/constraints.txt \
    && useradd --uid 1000 --create-home factory \
    && install -d -o factory /work/runs
USER 1000
WORKDIR /work
# `docker stop` sends SIGTERM: a run saves a checkpoint. Give it time: docker stop --time 120
ENTRYPOINT ["tfactory"]
CMD ["--help"]
