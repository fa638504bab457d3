// Speech as text, where the server transcribes: the button records until it is pressed again.

import { request } from "./api.js";
import { byId } from "./dom.js";

const MAX_SECONDS = 300;

/** Show the button, if the browser can record; `write(text)` gets what was said, `say(text)` what went wrong. */
export function offerSpeech(model, write, say) {
  const button = byId("speak");
  if (!navigator.mediaDevices?.getUserMedia || !window.MediaRecorder) return;
  let recorder = null;
  button.hidden = false;
  button.addEventListener("click", async () => {
    if (recorder) { recorder.stop(); return; }
    try {
      recorder = await record();
      mark(button, true);
      const audio = await recorder.ended;
      mark(button, false);
      write(await transcribe(audio, model()));
    } catch (error) {
      say(error.name === "NotAllowedError" ? "The browser does not let this page use the microphone." : error.message);
    } finally {
      recorder = null;
      mark(button, false);
    }
  });
}

function mark(button, recording) {
  const label = recording ? "End the recording" : "Speak";
  Object.assign(button, {ariaPressed: String(recording), ariaLabel: label, title: label});
}

/** A running recorder; `ended` resolves with the recording. */
async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({audio: true});
  const recorder = new MediaRecorder(stream), parts = [];
  recorder.addEventListener("dataavailable", event => parts.push(event.data));
  recorder.ended = new Promise(resolve => recorder.addEventListener("stop", () => {
    for (const track of stream.getTracks()) track.stop();
    resolve(new Blob(parts, {type: recorder.mimeType}));
  }));
  recorder.start();
  setTimeout(() => { if (recorder.state === "recording") recorder.stop(); }, 1000 * MAX_SECONDS);
  return recorder;
}

async function transcribe(audio, model) {
  const form = new FormData();
  form.append("file", audio, `speech.${audio.type.includes("mp4") ? "mp4" : audio.type.includes("ogg") ? "ogg" : "webm"}`);
  form.append("model", model);
  return (await (await request("v1/audio/transcriptions", {method: "POST", body: form})).json()).text.trim();
}
