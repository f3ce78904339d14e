// The API documentation: each route with its parameters and the schemas of its request and response.

const api = await (await fetch("/api/openapi.json")).json();
const shapes = api.components?.schemas ?? {};
const routes = document.getElementById("routes");

for (const [path, methods] of Object.entries(api.paths)) {
  for (const [method, route] of Object.entries(methods)) {
    const title = element("h2", "");
    title.append(element("b", method.toUpperCase()), element("code", path));
    routes.append(title, element("p", route.description ?? route.summary ?? ""));
    if (route.parameters?.length) routes.append(parameters(route.parameters));
    shape("request", route.requestBody);
    shape("response", route.responses?.["200"]);
  }
}

function parameters(list) {
  const table = document.createElement("table");
  for (const { name, in: place, required, schema } of list) {
    const row = table.insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = place + (required ? "" : ", optional") + ", " + text(schema, 0);
  }
  return table;
}

function shape(what, body) {
  const schema = body?.content?.["application/json"]?.schema;
  if (!schema || !Object.keys(schema).length) return;
  const details = document.createElement("details");
  details.append(element("summary", what), element("pre", text(schema, 0)));
  routes.append(details);
}

/** Returns a schema as a sketch of the JSON. */
function text(schema, depth, seen = []) {
  if (!schema) return "anything";
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return seen.includes(name) ? name : text(shapes[name], depth, [...seen, name]);
  }
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.map((each) => text(each, depth, seen)).join(" | ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array")
    return "[" + text(schema.items ?? schema.prefixItems?.[0], depth, seen) + ", ...]";
  if (schema.properties) {
    const inner = "\n" + "  ".repeat(depth + 1);
    const rows = Object.entries(schema.properties).map(
      ([name, each]) => name + ": " + text(each, depth + 1, seen),
    );
    return "{" + inner + rows.join("," + inner) + "\n" + "  ".repeat(depth) + "}";
  }
  if (schema.type === "object")
    return "{name: " + text(schema.additionalProperties || null, depth, seen) + "}";
  return schema.type ?? "anything";
}

function element(name, content) {
  const made = document.createElement(name);
  made.textContent = content;
  return made;
}
