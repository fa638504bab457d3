// How far a model is loaded that a request waits for, on a server of several.

import { getJson } from "./api.js";

const PAUSE = 500;  // milliseconds

/** Call `tell(words)` from time to time, until the function that is returned is called. */
export function tellLoading(model, tell) {
  let timer = null, over = false;
  const ask = async () => {
    const {data} = await getJson("v1/models").catch(() => ({data: []})), status = data.find(({id}) => id === model)?.status;
    if (over || !status) return;  // a server of one model has loaded it
    if (status.value === "loading") tell(loadingWords(model, status));
    timer = setTimeout(ask, PAUSE);
  };
  timer = setTimeout(ask, PAUSE);
  return () => { over = true; clearTimeout(timer); };
}

function loadingWords(model, {phase, progress}) {
  return `Loading ${model} …${phase ? ` ${phase} ${Math.round(100 * progress)} %` : ""}`;
}
