"""HTTP: the only folder that imports fastapi, sse-starlette and uvicorn. What is served is handed in."""
