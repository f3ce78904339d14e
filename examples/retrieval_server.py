"""An MCP server with dense retrieval: passages are found by their meaning. `search_server.py` beside it finds words.

Started as `python examples/retrieval_server.py CORPUS ENCODER`: a JSONL file or a folder of texts, and a folder with a
sentence encoder (hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir minilm). It needs faiss:
pip install 'training-factory[retrieval]'
"""

import sys

from mcp.server.mcpserver import MCPServer

from TrainingFactory.retrieval import RetrievalTool

if len(sys.argv) != 3:
    sys.exit("usage: python examples/retrieval_server.py CORPUS ENCODER")
retrieval = RetrievalTool(sys.argv[1], sys.argv[2])
server = MCPServer("retrieval")


@server.tool()
async def web_search(query: str) -> str:
    """Search the web"""
    return (await retrieval.run({"query": query})).content


if __name__ == "__main__":
    server.run()
