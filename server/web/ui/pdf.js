// The text of a PDF, by pdf.js, which is loaded with the first one. It runs in the page: the policy of the page's
// trusted types lets it start no worker.

const MAX_PAGES = 500;

/** The text of the pages. Throws a sentence for a file that cannot be read. */
export async function pdfText(file) {
  const [pdf, worker] = await Promise.all([import("./vendor/pdfjs/pdf.min.mjs"), import("./vendor/pdfjs/pdf.worker.min.mjs")]);
  globalThis.pdfjsWorker = worker;
  const task = pdf.getDocument({data: new Uint8Array(await file.arrayBuffer()), isEvalSupported: false, useWorkerFetch: false,
    disableFontFace: true, stopAtErrors: false, verbosity: 0});
  try {
    const found = await task.promise, pages = [];
    for (let number = 1; number <= Math.min(found.numPages, MAX_PAGES); number++) pages.push(await pageText(await found.getPage(number)));
    const text = pages.join("\n\n").trim();
    if (!text) throw new Error("it has no text, only pictures");
    return found.numPages > MAX_PAGES ? `${text}\n\n(The first ${MAX_PAGES} of ${found.numPages} pages.)` : text;
  } catch (error) {
    throw new Error(`${file.name} cannot be read: ${error.message}.`);
  } finally {
    await task.destroy();
  }
}

async function pageText(page) {
  const {items} = await page.getTextContent();
  return items.map(({str, hasEOL}) => str + (hasEOL ? "\n" : "")).join("");
}
