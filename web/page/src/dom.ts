// Helpers for the document. Text from files goes through textContent only, so that it cannot become markup.

type Child = Node | string;

/** Return the element with an id. */
export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`#${id} is missing`);
  return found as T;
}

/** Create an element with attributes and children. */
export function make(tag: string, attributes: Record<string, string> = {}, ...children: Child[]): HTMLElement {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Show an error until it is dismissed. At most a few are kept. */
export function showError(text: string): void {
  const box = byId("messages");
  const close = make("button", { type: "button" }, "Dismiss");
  const message = make("div", { class: "message error" }, make("span", {}, text), close);
  close.addEventListener("click", () => message.remove());
  box.append(message);
  while (box.children.length > 4) box.firstElementChild?.remove();
}

export function clearErrors(): void {
  byId("messages").replaceChildren();
}

export function formatBytes(bytes: number): string {
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

export function formatTime(milliseconds: number): string {
  return milliseconds < 100 ? `${milliseconds.toFixed(1)} ms` : milliseconds < 10_000 ? `${milliseconds.toFixed(0)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

export function formatThreads(threads: number): string {
  return threads === 1 ? "1 thread" : `${threads} threads`;
}
