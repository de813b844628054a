// Sets up the page.

function startTheme() {
  const button = document.getElementById("theme");
  const dark = () => {
    const own = document.documentElement.style.colorScheme;
    return own ? own === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    document.documentElement.style.colorScheme = dark() ? "light" : "dark";
    name();
  });
  name();
  button.hidden = false;
}

const data = JSON.parse(document.getElementById("data").textContent);
startTheme();
startTasks(data);
startOverall(data);
startTables();
