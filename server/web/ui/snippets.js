// A request as a program: curl and Python. The key is never written, only where to put it.

import { hasKey } from "./api.js";

const base = () => new URL("v1", location.href.replace(/#.*/, "")).href;

const quoted = text => `'${text.replaceAll("'", "'\\''")}'`;

export function asCurl(body) {
  const key = hasKey() ? ' \\\n  -H "Authorization: Bearer $QUIRE_API_KEY"' : "";
  return `curl ${base()}/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body, null, 1))}\n`;
}

export function asPython(body) {
  const key = hasKey() ? 'os.environ["QUIRE_API_KEY"]' : '"none"';
  return `${hasKey() ? "import os\n" : ""}import json

from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base())}, api_key=${key})
request = json.loads(${pythonText(JSON.stringify(body))})
known = {"model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed", "stop", "tools",
         "presence_penalty", "frequency_penalty", "response_format", "reasoning_effort"}
extra = {name: value for name, value in request.items() if name not in known}  # quire's own
answer = client.chat.completions.create(**{n: v for n, v in request.items() if n in known}, extra_body=extra)
for chunk in answer:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

/** A Python literal: JSON's escapes of a text are Python's too. */
const pythonText = text => JSON.stringify(text);
