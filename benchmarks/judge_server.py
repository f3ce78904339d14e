"""The endpoint of benchmarks.judge, in a process of its own: every answer takes a while, and so many run at a time."""

from __future__ import annotations

import asyncio
import json
import sys

SCORE = {"choices": [{"message": {"role": "assistant", "content": "Score: 7"}, "finish_reason": "stop"}]}
SCORE |= {"usage": {"prompt_tokens": 200, "completion_tokens": 4}}


async def main(seconds: float, capacity: int) -> None:
    """Prints its port. Ends with its standard input."""
    places = asyncio.Semaphore(capacity)
    data = json.dumps(SCORE).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
    answer += b"Content-Length: %d\r\n\r\n%b" % (len(data), data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
        await reader.readexactly(int(length.split(":")[1]))
        async with places:
            await asyncio.sleep(seconds)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), int(sys.argv[2])))
