// The newest openai and Vercel AI SDK of npm transcribe a file with a running `quire serve` of a Whisper model.
//
// In a folder with the packages of node_clients.mjs:
//     quire serve openai/whisper-base --port 8000 &
//     cp tests/clients/audio_clients.mjs FOLDER && cd FOLDER
//     node audio_clients.mjs http://127.0.0.1:8000/v1 talk.wav
// Prints one line per check, and ends with status 1 at the first that fails.
import assert from 'node:assert/strict';
import { createReadStream } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { createOpenAI } from '@ai-sdk/openai';
import * as ai from 'ai';
import OpenAI from 'openai';

const [baseURL, path] = process.argv.slice(2);
const transcribe = ai.transcribe ?? ai.experimental_transcribe;

async function check(name, run) {
  await run();
  console.log(`ok ${name}`);
}

const client = new OpenAI({ baseURL, apiKey: 'unused', maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const ask = (more = {}) => client.audio.transcriptions.create({ model, file: createReadStream(path), ...more });
const { text } = await ask();

await check('openai: verbose_json', async () => {
  const answer = await ask({ response_format: 'verbose_json', timestamp_granularities: ['segment'] });
  assert.ok(answer.segments.length > 0 && answer.duration > 0);
});

await check('openai: stream', async () => {
  let deltas = '';
  let done = null;
  for await (const event of await ask({ stream: true })) {
    if (event.type === 'transcript.text.delta') deltas += event.delta;
    if (event.type === 'transcript.text.done') done = event.text;
  }
  assert.equal(deltas, text);
  assert.equal(done, text);
});

await check('openai: a refusal', async () => {
  await assert.rejects(ask({ language: 'xx' }), error => error.status === 400 && error.param === 'language');
});

await check('AI SDK: transcribe', async () => {
  const provider = createOpenAI({ baseURL, apiKey: 'unused' });
  const answer = await transcribe({ model: provider.transcription(model), audio: await readFile(path) });
  assert.equal(answer.text, text);
});

await check('AI SDK: transcribe with segments', async () => {
  const provider = createOpenAI({ baseURL, apiKey: 'unused' });
  const answer = await transcribe({
    model: provider.transcription(model),
    audio: await readFile(path),
    providerOptions: { openai: { language: 'en', timestampGranularities: ['segment'], responseFormat: 'verbose_json' } },
  });
  assert.ok(answer.text.length > 0);
  console.log(`   language ${answer.language}, ${answer.durationInSeconds} s, ${answer.segments.length} segments`);
});
