// Checks every dashboard against @grafana/schema, and that invalid ones are rejected.

import { spawnSync } from "node:child_process";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const dashboards = join(here, "..", "grafana", "dashboards");
const generated = join(here, "generated");

const INVALID = {
  "a schema version in quotes": (board) => (board.schemaVersion = "42"),
  "a unit that is a number": (board) => (firstOf(board, "stat").fieldConfig.defaults.unit = 5),
  "a panel without a title": (board) => delete firstOf(board, "timeseries").title,
  "an unknown kind of panel": (board) => (firstOf(board, "stat").type = "statistic"),
  "an unknown draw style": (board) =>
    (firstOf(board, "timeseries").fieldConfig.defaults.custom.drawStyle = "columns"),
  "an unknown option of a stat": (board) => (firstOf(board, "stat").options.colourMode = "value"),
  "a variable of an unknown kind": (board) => (board.templating.list[0].type = "source"),
  "an annotation without a query": (board) => delete board.annotations.list[0].expr,
  "a text of an unknown kind": (board) => (firstOf(board, "text").options.mode = "latex"),
  "a panel without a position": (board) => (firstOf(board, "stat").gridPos = { x: 0 }),
};

function firstOf(board, type) {
  return board.panels.find((panel) => panel.type === type);
}

function isAccepted(board, name) {
  rmSync(generated, { recursive: true, force: true });
  mkdirSync(generated);
  const text = JSON.stringify(board, null, 2);
  writeFileSync(
    join(generated, `${name}.ts`),
    `import type { Checked } from "../shapes.js";\n\nexport const board: Checked = ${text};\n`,
  );
  const compiler = join(here, "node_modules", ".bin", "tsc");
  const done = spawnSync(compiler, ["--project", here], { encoding: "utf8" });
  return { accepted: done.status === 0, output: done.stdout + done.stderr };
}

const read = (name) => JSON.parse(readFileSync(join(dashboards, name), "utf8"));
const names = readdirSync(dashboards).filter((name) => name.endsWith(".json"));
let failures = names.length === 3 ? 0 : 1;

for (const name of names) {
  const { accepted, output } = isAccepted(read(name), name.replace(".json", ""));
  console.log(`${accepted ? "ok" : "WRONG"}: ${name}`);
  if (!accepted) {
    console.log(output);
    failures += 1;
  }
}
for (const [what, damage] of Object.entries(INVALID)) {
  const board = read("agent-limits.json");
  damage(board);
  const { accepted } = isAccepted(board, "invalid");
  console.log(`${accepted ? "ACCEPTED" : "ok"}: ${what} is rejected`);
  failures += accepted ? 1 : 0;
}
rmSync(generated, { recursive: true, force: true });
process.exit(failures ? 1 : 0);
