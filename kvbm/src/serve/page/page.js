const show = async () => {
  const state = await (await fetch("v1/state")).json();
  document.getElementById("state").textContent = JSON.stringify(state, null, 2);
};
setInterval(show, 1000);
show();
