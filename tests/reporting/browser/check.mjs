// Look at pages in a browser. Arguments: the browser, then files. Prints what is wrong with each, as JSON: by file a list
// of sentences. PICTURES names a folder for pictures of them.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { basename } from 'node:path';
import { pathToFileURL } from 'node:url';
import { chromium } from 'playwright-core';

const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const [executablePath, ...files] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
const found = {};
for (const file of files) {
  found[file] = [];
  for (const width of [1280, 400])
    for (const colorScheme of ['light', 'dark']) {
      const wrong = await look(file, width, colorScheme);
      found[file].push(...wrong.map((text) => `${width} ${colorScheme}: ${text}`));
    }
}
await browser.close();
console.log(JSON.stringify(found));

async function look(file, width, colorScheme) {
  const wrong = [];
  // The page forbids scripts, axe's too: the browser is told to overlook that, and the page is loaded without first.
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, bypassCSP: true });
  const page = await context.newPage();
  page.on('console', (message) => wrong.push(`console: ${message.text()}`));
  page.on('pageerror', (error) => wrong.push(`error: ${error}`));
  page.on('request', (request) => {
    if (request.url() !== pathToFileURL(file).href) wrong.push(`request: ${request.url()}`);
  });
  page.on('dialog', (dialog) => {
    wrong.push(`dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  await page.goto(pathToFileURL(file).href);
  if (process.env.PICTURES)
    await page.screenshot({ path: `${process.env.PICTURES}/${basename(file)}-${width}-${colorScheme}.png`, fullPage: true });
  wrong.push(...(await page.evaluate(faults)));
  await page.evaluate(() => document.querySelectorAll('details').forEach((one) => (one.open = true)));
  wrong.push(...(await page.evaluate(faults)));
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  for (const { id, impact, nodes } of violations)
    if (impact === 'serious' || impact === 'critical') wrong.push(`axe: ${id}: ${nodes[0].html.slice(0, 200)}`);
  await context.close();
  return wrong;
}

// In the page: it is no wider than the window, each plot shows something in colors that the theme knows, each link
// leads to a place of the page, and no id stands twice.
function faults() {
  const wrong = [];
  const root = document.documentElement;
  if (root.scrollWidth > window.innerWidth) wrong.push(`overflow: ${root.scrollWidth}`);
  for (const svg of document.querySelectorAll('svg')) {
    const name = svg.getAttribute('aria-labelledby');
    const shapes = [...svg.querySelectorAll('path')].filter((one) => {
      const { width, height } = one.getBBox();
      const { fill, stroke } = getComputedStyle(one);
      return width > 1 && height > 1 && (fill !== 'none' || stroke !== 'none');
    });
    if (shapes.length === 0) wrong.push(`empty plot: ${name}`);
    if (svg.querySelectorAll('text').length < 3) wrong.push(`plot without numbers: ${name}`);
    const box = svg.getBoundingClientRect();
    if (box.width < 250 || box.height < 100) wrong.push(`small plot: ${name}`);
    for (const text of svg.querySelectorAll('text')) {
      const at = text.getBoundingClientRect();
      if (at.left < 0 || at.right > root.clientWidth) wrong.push(`text out of sight: ${text.textContent} of ${name}`);
    }
    const boxes = [...svg.querySelectorAll('text')].map((one) => one.getBoundingClientRect());
    for (const [n, one] of boxes.entries())
      for (const other of boxes.slice(n + 1))
        if (
          Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1 &&
          Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 4
        )
          wrong.push(`numbers on top of each other: ${name}`);
    const known = getComputedStyle(root);
    for (const used of svg.outerHTML.matchAll(/var\((--[\w-]+)\)/g))
      if (!known.getPropertyValue(used[1])) wrong.push(`no color ${used[1]}: ${name}`);
  }
  for (const link of document.querySelectorAll('a'))
    if (!document.getElementById(link.getAttribute('href').slice(1))) wrong.push(`dead link: ${link.outerHTML}`);
  const ids = [...document.querySelectorAll('[id]')].map((one) => one.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push(`id twice: ${id}`);
  return wrong;
}
