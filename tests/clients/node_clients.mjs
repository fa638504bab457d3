// The newest openai and Vercel AI SDK of npm against a running `quire serve` (the embedded model).
//
// Needs Node 20 or later and these packages, in any folder:
//     npm install openai ai @ai-sdk/openai-compatible zod
//     quire serve --port 8000 &
//     cp tests/clients/node_clients.mjs FOLDER && cd FOLDER && node node_clients.mjs http://127.0.0.1:8000/v1
// Prints one line per check, and ends with status 1 at the first that fails.
import assert from 'node:assert/strict';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat } from 'openai/helpers/zod';
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

const vercel = createOpenAICompatible({ name: 'quire', baseURL, supportsStructuredOutputs: true })(model);
const tools = (asked) => ({
  get_weather: tool({ description, inputSchema: city, execute: async (given) => (asked.push(given.city), weather()) }),
});

await check('ai: generateObject', async () => {
  const { object } = await generateObject({ model: vercel, schema: person, prompt: describe, temperature: 0 });
  assert.deepEqual(object, anna);
});

await check('ai: generateText with tools', async () => {
  const asked = [];
  const { text } = await generateText({
    model: vercel,
    tools: tools(asked),
    stopWhen: stepCountIs(3),
    prompt: question,
    temperature: 0,
  });
  assert.match(text, /21|sunny/);
  assert.deepEqual(asked, ['Paris']);
});

await check('ai: streamText with tools and an effort', async () => {
  const asked = [];
  const result = streamText({
    model: vercel,
    tools: tools(asked),
    stopWhen: stepCountIs(3),
    prompt: question,
    temperature: 0,
    providerOptions: { quire: { reasoningEffort: 'low' } },
  });
  assert.match(await result.text, /21|sunny/);
  assert.deepEqual(asked, ['Paris']);
});
