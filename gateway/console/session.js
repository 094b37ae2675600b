// The key of this tab and calls that carry it, in a header and never in an address.
const NAME = "key";

// The path under which a proxy serves the gateway, without a slash at its end; mostly empty.
export const root = new URL("..", import.meta.url).pathname.slice(0, -1);

export const key = () => sessionStorage.getItem(NAME) ?? "";

export function setKey(value) {
  sessionStorage.setItem(NAME, value.trim());
}

export const headers = () => (key() ? { authorization: `Bearer ${key()}` } : {});

// What a refusal says of itself, as an error with its status.
export async function refusal(response) {
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
  error.status = response.status;
  error.passes = response.status === 503;
  return error;
}

export async function call(method, path, body, more = {}) {
  const response = await fetch(root + path, {
    method,
    headers: { ...headers(), ...more, ...(body === undefined ? {} : { "content-type": "application/json" }) },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw await refusal(response);
  return response.json();
}
