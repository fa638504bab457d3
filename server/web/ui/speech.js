// Speech as text, where the server transcribes: the button records until it is pressed again. The recording is sent as
// WAV, which each server reads, whatever the browser records.

import { request } from "./api.js";
import { byId } from "./dom.js";

const MAX_SECONDS = 300, RATE = 16_000;

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
  form.append("file", await wavOf(audio), "speech.wav");
  form.append("model", model);
  const headers = {"X-Requested-With": "quire"};  // the server takes no form without it that may come from another page
  return (await (await request("v1/audio/transcriptions", {method: "POST", body: form, headers})).json()).text.trim();
}

/** The recording as WAV with one channel of 16 bits. */
async function wavOf(audio) {
  const context = new OfflineAudioContext(1, 1, RATE);
  const decoded = await context.decodeAudioData(await audio.arrayBuffer()).catch(() => { throw new Error("Nothing was recorded."); });
  const channels = Array.from({length: decoded.numberOfChannels}, (_, i) => decoded.getChannelData(i));
  const data = new DataView(new ArrayBuffer(44 + 2 * decoded.length));
  const text = (at, letters) => [...letters].forEach((letter, i) => data.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  data.setUint32(4, data.byteLength - 8, true);
  text(8, "WAVEfmt ");
  data.setUint32(16, 16, true);  // bytes of what follows
  data.setUint16(20, 1, true);  // PCM
  data.setUint16(22, 1, true);  // channels
  data.setUint32(24, RATE, true);
  data.setUint32(28, 2 * RATE, true);  // bytes per second
  data.setUint16(32, 2, true);  // bytes per sample
  data.setUint16(34, 16, true);  // bits
  text(36, "data");
  data.setUint32(40, 2 * decoded.length, true);
  for (let i = 0; i < decoded.length; i++) {
    const value = channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length;
    data.setInt16(44 + 2 * i, Math.round(32767 * Math.max(-1, Math.min(1, value))), true);
  }
  return new Blob([data], {type: "audio/wav"});
}
