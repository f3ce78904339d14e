"""HTTP servers: the only package that imports fastapi, sse-starlette and uvicorn. Callers pass in the handlers."""
