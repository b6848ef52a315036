// Looks at a report by hand: screenshots at 1400 and 400 px, light and dark, and axe-core's findings.
//   npm install playwright-core axe-core   (anywhere; nothing of recoup needs them)
//   node bench/report_page.mjs report.html OUT_FOLDER     (run where node finds both packages)
import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(path.join(process.cwd(), "here.js"));
const { chromium } = require("playwright-core");
const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const [page, folder] = process.argv.slice(2).map((name) => path.resolve(name));
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
});
let failed = false;
for (const width of [1400, 400]) for (const colorScheme of ["light", "dark"]) {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, bypassCSP: true });
  const tab = await context.newPage();
  const said = [], asked = [];
  tab.on("console", (message) => said.push(message.text()));
  tab.on("pageerror", (error) => said.push(String(error)));
  tab.on("request", (request) => asked.push(request.url()));
  await tab.goto(pathToFileURL(page).href);
  await tab.screenshot({ path: path.join(folder, `${width}-${colorScheme}.png`), fullPage: true });
  const overflow = await tab.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  await tab.addScriptTag({ content: axe });
  const found = await tab.evaluate(async () => (await axe.run()).violations.map((v) => `${v.impact}: ${v.id}`));
  failed ||= said.length > 0 || asked.length > 1 || overflow || found.length > 0;
  console.log({ width, colorScheme, overflow, said, asked: asked.slice(1), found });
  await context.close();
}
await browser.close();
process.exit(failed ? 1 : 0);
