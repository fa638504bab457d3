// Files that a message takes along: images as they are, texts and PDFs as text.

const MAX_IMAGE = 20 * 2 ** 20, MAX_TEXT = 2 * 2 ** 20, MAX_PDF = 50 * 2 ** 20;  // bytes; the server has limits of its own

/** {image: data URL} or {file: {name, text}}. Throws a sentence for what cannot be taken. */
export async function readAttachment(file, images) {
  if (file.type.startsWith("image/")) {
    if (!images.accepted) throw new Error(`This model takes no images: ${images.reason}.`);
    if (file.size > MAX_IMAGE) throw new Error(`${file.name} is larger than 20 MiB.`);
    return {image: await dataUrl(file)};
  }
  if (file.type === "application/pdf" || /\.pdf$/i.test(file.name)) {
    if (file.size > MAX_PDF) throw new Error(`${file.name} is larger than 50 MiB.`);
    const {pdfText} = await import("./pdf.js");
    return {file: {name: file.name, text: await pdfText(file)}};
  }
  if (file.size > MAX_TEXT) throw new Error(`${file.name} is larger than 2 MiB.`);
  return {file: {name: file.name, text: await textOf(file)}};
}

async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch { /* no UTF-8: told below */ }
  throw new Error(`${file.name} is neither an image nor a text in UTF-8.`);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
