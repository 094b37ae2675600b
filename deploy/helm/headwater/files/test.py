"""The program of `helm test`: URL KEYS [--chat] MODEL…

Asks until the gateway is ready, compares the models that it lists, and with --chat lets the first
one answer. Needs nothing but Python's own library.
"""

import json
import ssl
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

READY_SECONDS = 60.0
ANSWER_SECONDS = 600.0
"""An engine may have to start first."""
# The certificate is made out to the name that clients use, not to the service's.
CONTEXT = ssl._create_unverified_context()


def ask(url: str, key: str = "", body: object = None, seconds: float = 10.0) -> dict[str, object]:
    headers = {"content-type": "application/json"} | (
        {"authorization": f"Bearer {key}"} if key else {}
    )
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, headers), timeout=seconds, context=CONTEXT) as reply:
        return json.loads(reply.read() or b"{}")


def wait_until_ready(url: str) -> None:
    end = time.monotonic() + READY_SECONDS
    while True:
        try:
            with urlopen(f"{url}/ready", timeout=5, context=CONTEXT):
                return
        except URLError as error:
            if time.monotonic() > end:
                sys.exit(f"{url}/ready: {error}")
            time.sleep(1)


def main(url: str, keys: str, *models: str, chat: bool) -> None:
    with open(keys) as file:
        _, key = file.readline().split()
    wait_until_ready(url)
    listed = {each["id"] for each in ask(f"{url}/v1/models", key)["data"]}
    if missing := set(models) - listed:
        sys.exit(
            f"models are not listed: {', '.join(sorted(missing))}; listed: {', '.join(sorted(listed))}"
        )
    print(f"ready, with {', '.join(models)}")
    if chat:
        messages = [{"role": "user", "content": "Say yes."}]
        body = {"model": models[0], "messages": messages, "max_tokens": 1}
        answer = ask(f"{url}/v1/chat/completions", key, body, ANSWER_SECONDS)
        print(f"{models[0]} answers: {answer['choices'][0]['message']['content']!r}")


if __name__ == "__main__":
    given = [each for each in sys.argv[1:] if each != "--chat"]
    main(*given, chat="--chat" in sys.argv)
