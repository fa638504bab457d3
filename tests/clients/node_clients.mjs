// The newest openai and Vercel AI SDK of npm against a running `quire serve` (the embedded model).
//
// Needs Node 22 or later (with an older one, npm silently installs older packages), and in any folder:
//     npm install openai@latest ai@latest @ai-sdk/openai-compatible@latest @ai-sdk/openai@latest zod@latest
//     quire serve --port 8000 &
//     cp tests/clients/node_clients.mjs FOLDER && cd FOLDER && node node_clients.mjs http://127.0.0.1:8000/v1
// Prints one line per check, and ends with status 1 at the first that fails.
import assert from 'node:assert/strict';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from 'ai';
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const baseURL = process.argv[2] ?? 'http://127.0.0.1:8000/v1';
const person = z.object({ name: z.string(), age: z.number().int() });
const anna = { name: 'Anna', age: 31 };
const describe = 'Write a JSON object with name Anna and age 31.';
const question = 'What is the weather in Paris?';
const city = z.object({ city: z.string() });
const weather = () => JSON.stringify({ temperature: 21, sky: 'sunny' });
const description = 'Get the current weather in a city.';

async function check(name, run) {
  await run();
  console.log(`ok ${name}`);
}

const client = new OpenAI({ baseURL, apiKey: 'unused', maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const ask = { model, temperature: 0, max_tokens: 200 };

await check('openai: parse', async () => {
  const answer = await client.chat.completions.parse({
    ...ask,
    messages: [{ role: 'user', content: describe }],
    response_format: zodResponseFormat(person, 'person'),
  });
  assert.deepEqual(answer.choices[0].message.parsed, anna);
});

await check('openai: a stream of a schema', async () => {
  const body = { ...ask, messages: [{ role: 'user', content: describe }] };
  const stream = client.chat.completions.stream({ ...body, response_format: zodResponseFormat(person, 'person') });
  assert.deepEqual((await stream.finalChatCompletion()).choices[0].message.parsed, anna);
});

await check('openai: responses.parse', async () => {
  const format = zodTextFormat(person, 'person');
  const answer = await client.responses.parse({ model, temperature: 0, input: describe, text: { format } });
  assert.deepEqual(answer.output_parsed, anna);
});

for (const stream of [false, true]) {
  await check(`openai: runTools, stream ${stream}`, async () => {
    const asked = [];
    const runner = client.chat.completions.runTools({
      ...ask,
      stream,
      messages: [{ role: 'user', content: question }],
      tools: [
        zodFunction({
          name: 'get_weather',
          description,
          parameters: city,
          function: (given) => (asked.push(given.city), weather()),
        }),
      ],
    });
    assert.match(await runner.finalContent(), /21|sunny/);
    assert.deepEqual(asked, ['Paris']);
  });
}

const compatible = createOpenAICompatible({ name: 'quire', baseURL, supportsStructuredOutputs: true });
const provider = createOpenAI({ baseURL, apiKey: 'unused' });
const models = {
  'openai-compatible': compatible(model),
  'openai, chat': provider.chat(model),
  'openai, responses': provider.responses(model),
};
const tools = (asked) => ({
  get_weather: tool({ description, inputSchema: city, execute: async (given) => (asked.push(given.city), weather()) }),
});

for (const [name, vercel] of Object.entries(models)) {
  const object = { model: vercel, prompt: describe, temperature: 0 };
  const loop = (asked) => ({
    model: vercel,
    prompt: question,
    tools: tools(asked),
    stopWhen: stepCountIs(3),
    temperature: 0,
  });

  await check(`ai, ${name}: generateObject`, async () => {
    assert.deepEqual((await generateObject({ ...object, schema: person })).object, anna);
  });

  await check(`ai, ${name}: streamObject`, async () => {
    const result = streamObject({ ...object, schema: person });
    const parts = [];
    for await (const part of result.partialObjectStream) parts.push(part);
    assert.deepEqual(parts.at(-1), anna);
    assert.deepEqual(await result.object, anna);
  });

  await check(`ai, ${name}: generateText with an object as output`, async () => {
    assert.deepEqual((await generateText({ ...object, output: Output.object({ schema: person }) })).output, anna);
  });

  await check(`ai, ${name}: generateText with tools`, async () => {
    const asked = [];
    assert.match((await generateText(loop(asked))).text, /21|sunny/);
    assert.deepEqual(asked, ['Paris']);
  });

  for (const choice of ['required', { type: 'tool', toolName: 'get_weather' }]) {
    await check(`ai, ${name}: generateText, toolChoice ${choice.type ?? choice}`, async () => {
      const asked = [];
      const { toolCalls } = await generateText({ ...loop(asked), toolChoice: choice, stopWhen: stepCountIs(1) });
      assert.deepEqual(toolCalls.map((call) => [call.toolName, call.input]), [['get_weather', { city: 'Paris' }]]);
    });
  }

  await check(`ai, ${name}: streamText with tools`, async () => {
    const asked = [];
    const result = streamText(loop(asked));
    const kinds = new Set();
    for await (const part of result.fullStream) kinds.add(part.type);
    assert.match(await result.text, /21|sunny/);
    assert.deepEqual(asked, ['Paris']);
    for (const kind of ['tool-input-start', 'tool-input-delta', 'tool-call', 'tool-result', 'text-delta', 'finish'])
      assert.ok(kinds.has(kind), `${kind} is missing in ${[...kinds]}`);
  });
}

await check('ai, openai-compatible: streamText with an effort', async () => {
  const providerOptions = { quire: { reasoningEffort: 'low' } };
  const result = streamText({ model: models['openai-compatible'], prompt: question, temperature: 0, providerOptions });
  assert.ok(await result.text);
});
