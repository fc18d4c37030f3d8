// A conversation as data. Its messages are one path of a tree: each message has versions, and a version that is not the
// current one keeps the messages that followed it. Knows nothing of the page, the network or the storage.
//
// user      {content, files: [{name, text}]}
// assistant {content, reasoning, thought, calls: [{id, name, arguments}], finish, model, stats}   thought in seconds
// tool      {results: [{id, name, content}]}

export const versionOf = (message) => message.versions[message.current];

export const newAnswer = (model) => ({
  content: "",
  reasoning: "",
  thought: null,
  calls: [],
  finish: null,
  model,
  stats: { prompt: null, cached: null, completion: null, reasoning: null, first: null, speed: null },
});

export const isEmpty = ({ content, reasoning, calls }) => !content && !reasoning && !calls.length;

/** Another version of a message becomes the current one; what follows is what followed it. */
export function switchVersion({ messages }, index, to) {
  const message = messages[index];
  versionOf(message).tail = messages.splice(index + 1);
  message.current = to;
  messages.push(...(versionOf(message).tail ?? []));
  delete versionOf(message).tail;
}

/** A new version of a message, without anything behind it. */
export function addVersion({ messages }, index, version) {
  const message = messages[index];
  versionOf(message).tail = messages.splice(index + 1);
  message.current = message.versions.push(version) - 1;
}

/** Removes the current version of the last message: the one before it is current again, or the message is gone. */
export function dropVersion(conversation) {
  const { messages } = conversation;
  const message = messages.at(-1);
  message.versions.splice(message.current, 1);
  message.current = message.versions.length - 1;
  if (!message.versions.length) {
    messages.pop();
    return;
  }
  messages.push(...(versionOf(message).tail ?? []));
  delete versionOf(message).tail;
}

/** Everything that a message says, for search. */
export function textOf(message) {
  const { content = "", files = [], calls = [], results = [] } = versionOf(message);
  return [
    content,
    ...files.flatMap(({ name, text }) => [name, text]),
    ...calls.map((call) => `${call.name} ${call.arguments}`),
    ...results.map((result) => result.content),
  ].join("\n");
}

/** A fence that nothing in `text` ends. */
export const fenceFor = (text) => "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length + 1)));

/** A question with the text of its files, each under its name. */
export function withFiles({ content, files }) {
  const parts = files.map(({ name, text }) => {
    const fence = fenceFor(text);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [content, ...parts].filter(Boolean).join("\n\n");
}

/** Whether an answer was cut off within a call: the call's arguments are not JSON then. */
function isCutOff(version, call) {
  if (version.finish === "stop") return false;
  try {
    JSON.parse(call.arguments);
    return false;
  } catch {
    return true;
  }
}

/** The messages of the API, without calls that were cut off. */
export function apiMessages(messages) {
  return messages.flatMap((message) => {
    const version = versionOf(message);
    if (message.role === "user") return [{ role: "user", content: withFiles(version) }];
    if (message.role === "tool") return version.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
    const answer = { role: "assistant", content: version.content };
    if (version.reasoning) answer.reasoning_content = version.reasoning;
    const calls = version.calls.filter((call) => !isCutOff(version, call));
    if (calls.length) {
      answer.tool_calls = calls.map(({ id, name, arguments: given }) => ({
        id,
        type: "function",
        function: { name, arguments: given },
      }));
    }
    return [answer];
  });
}

/** `title` and the current path as Markdown; `label(role)` names who speaks. */
export function asMarkdown({ title, messages }, label) {
  const parts = [`# ${title}`];
  for (const message of messages) {
    const version = versionOf(message);
    parts.push(`## ${message.role === "assistant" ? version.model || label("assistant") : label(message.role)}`);
    if (message.role === "user") parts.push(withFiles(version));
    if (version.reasoning) parts.push(quoted(version.reasoning));
    if (message.role === "assistant" && version.content) parts.push(version.content);
    for (const call of version.calls ?? []) parts.push(`\`${call.name}\``, fenced(call.arguments, "json"));
    for (const result of version.results ?? []) parts.push(`\`${result.name}\``, fenced(result.content, ""));
  }
  return `${parts.join("\n\n")}\n`;
}

const quoted = (text) => text.trim().split("\n").map((line) => `> ${line}`.trimEnd()).join("\n");

function fenced(text, language) {
  const fence = fenceFor(text);
  return `${fence}${language}\n${text}\n${fence}`;
}
