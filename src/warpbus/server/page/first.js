// Runs before the first paint, so that a chosen theme does not flash; page.js does the rest.
"use strict";
try {
  const { theme } = JSON.parse(localStorage.getItem("warpbus.settings") || "{}");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage, or nothing sensible in it: the system's theme.
}
