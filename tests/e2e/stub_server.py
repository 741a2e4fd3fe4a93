"""A server that speaks just enough of OpenAI's API to be measured, or to misbehave.

Run alone it serves until it is killed: stub_server.py PORT [MODE] [FIRST_MS] [GAP_MS] [TOKENS].
"""

import asyncio
import json
import sys
import threading

MODELS = json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]})


def head(status="200 OK", kind="application/json", extra=""):
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{extra}".encode()


def whole(body, status="200 OK"):
    return head(status, extra=f"Content-Length: {len(body)}\r\n\r\n") + body.encode()


def chunk(text):
    data = text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def frame(value):
    return chunk("data: " + (value if isinstance(value, str) else json.dumps(value)) + "\n\n")


class Stub:
    """mode: good, no-usage, unauthorized, refused, late-error, half, stall, silent, garbage,
    busy-first (503 twice), closes (after each answer, without saying so)."""

    def __init__(self, mode="good", first=0.0, gap=0.0, tokens=4):
        self.mode, self.first, self.gap, self.tokens = mode, first, gap, tokens
        self.requests, self.bodies, self.port = 0, [], 0

    async def read_request(self, reader):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = [int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length")]
        body = await reader.readexactly(length[0]) if length else b""
        return lines[0].split(" "), body

    async def stream(self, writer, chat, tokens):
        loop = asyncio.get_running_loop()
        begin = loop.time()
        writer.write(head(kind="text/event-stream", extra="Transfer-Encoding: chunked\r\n\r\n"))
        for i in range(tokens):
            wait = begin + self.first + i * self.gap - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            part = {"delta": {"content": " word"}} if chat else {"text": " word"}
            writer.write(frame({"choices": [{"index": 0, "finish_reason": None, **part}]}))
            if i == 1 and self.mode == "late-error":
                writer.write(frame({"error": {"message": "the engine fell over"}}))
                break
            if i == 1 and self.mode == "half":
                await writer.drain()
                writer.close()
                return
            if i == 1 and self.mode == "stall":
                await writer.drain()
                await asyncio.sleep(3600)
        if self.mode != "no-usage" and writer.wants_usage:
            usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
            writer.write(frame({"choices": [], "usage": usage}))
        writer.write(frame("[DONE]") + b"0\r\n\r\n")

    async def answer(self, writer, target, body):
        if self.mode == "unauthorized":
            writer.write(whole('{"error": "Unauthorized"}', "401 Unauthorized"))
        elif target.endswith("/models"):
            writer.write(whole(MODELS))
        elif not target.endswith("completions"):
            writer.write(whole('{"error": {"message": "no such route"}}', "404 Not Found"))
        elif self.mode == "silent":
            await asyncio.sleep(3600)
        elif self.mode == "garbage":
            writer.write(b"\x00\x01 this is no HTTP\r\n\r\n")
        elif self.mode == "busy-first" and self.requests <= 3:
            writer.write(whole('{"error": {"message": "loading"}}', "503 Service Unavailable"))
        elif self.mode == "refused":
            writer.write(whole('{"error": {"message": "no such field"}}', "400 Bad Request"))
        else:
            value = json.loads(body)
            self.bodies.append(value)
            writer.wants_usage = (value.get("stream_options") or {}).get("include_usage", False)
            asked = value.get("max_tokens") or value.get("max_completion_tokens") or self.tokens
            await self.stream(writer, "chat" in target, self.tokens if self.gap == 0 else asked)

    async def serve(self, reader, writer):
        try:
            while not writer.is_closing():
                (_, target, _), body = await self.read_request(reader)
                self.requests += 1
                await self.answer(writer, target, body)
                await writer.drain()
                if self.mode == "closes":
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run(self, port, ready):
        server = await asyncio.start_server(self.serve, "127.0.0.1", port, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await server.serve_forever()

    def start(self):
        """Serves from a thread that ends with the program; returns the URL."""
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self.run(0, ready)), daemon=True).start()
        assert ready.wait(10)
        return f"http://127.0.0.1:{self.port}"


if __name__ == "__main__":
    words = sys.argv[1:] + ["good", "0", "0", "4"][len(sys.argv) - 2:]
    stub = Stub(words[1], float(words[2]) / 1000, float(words[3]) / 1000, int(words[4]))
    asyncio.run(stub.run(int(words[0]), threading.Event()))
