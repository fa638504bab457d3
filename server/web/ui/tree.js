// Versions of messages. `messages` is the path that is shown; the first message of a part that has other versions holds
// them as versions: {at, tails}, where tails[at], the shown one, is null and the others are lists of messages.

/** Put `message` in the place of message `index`; that one and what followed it become another version. */
export function branch(messages, index, message) {
  const old = messages.splice(index, Infinity, message);
  const {at, tails} = old[0].versions ?? {at: 0, tails: [null]};
  delete old[0].versions;
  message.versions = {at: tails.length, tails: [...tails.with(at, old), null]};
}

/** Show version `at` of message `index` and what followed it. */
export function showVersion(messages, index, at) {
  const {versions} = messages[index], next = versions.tails[at];
  if (!next) return;
  const old = messages.splice(index, Infinity, ...next);
  delete old[0].versions;
  next[0].versions = {at, tails: versions.tails.with(versions.at, old).with(at, null)};
}

/** All messages, also those of versions that are not shown. */
export function* everyMessage(messages) {
  for (const message of messages) {
    yield message;
    for (const tail of message.versions?.tails ?? []) if (tail) yield* everyMessage(tail);
  }
}
