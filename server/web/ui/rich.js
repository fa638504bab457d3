// What is loaded only when a text needs it: colours of code.

export function decorate() {}
