# TrainingFactory on a CPU.
#   docker build -t training-factory .
#   docker run --rm -v "$PWD/runs:/home/factory/runs" training-factory demo
#   docker run --rm -p 127.0.0.1:7860:7860 -v "$PWD/runs:/home/factory/runs" training-factory ui --host 0.0.0.0
FROM python:3.11-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim
# The default torch for x86-64 brings CUDA libraries that a CPU does not need. For a smaller image, pass the address of
# PyTorch's index of CPU builds: --build-arg TORCH_INDEX=ADDRESS
ARG TORCH_INDEX=""
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /dist /dist
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir -c /tmp/constraints.txt \
        --extra-index-url "$TORCH_INDEX" torch; fi \
    && pip install --no-cache-dir -c /tmp/constraints.txt "$(ls /dist/*.whl)[rl]" \
    && rm -r /dist /tmp/constraints.txt \
    && useradd --uid 1000 --create-home factory \
    && install -d -o factory /home/factory/runs
USER 1000
WORKDIR /home/factory
# `docker stop` sends SIGTERM: a run saves a checkpoint. Give it time: docker stop --time 120
ENTRYPOINT ["tfactory"]
CMD ["--help"]
